"""The planner: of all plans for a model on a cluster, the fastest that fits, and why."""
