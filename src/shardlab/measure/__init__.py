"""What this machine does in how many seconds: collectives, and the models' layers; fitted, for the simulator."""
