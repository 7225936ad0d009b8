"""Published runs predicted: how far the simulator's seconds and bytes are from what others have measured."""
