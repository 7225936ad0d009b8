"""From a command to ranks: launchers and their variables, processes, meeting, interrupts, and job scripts."""
