"""What a real run measured, in the form that simulation produces, and how the two compare."""
