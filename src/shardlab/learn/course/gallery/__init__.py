"""Gallery of published bugs as small programs to find and mend, numbered from 101."""
