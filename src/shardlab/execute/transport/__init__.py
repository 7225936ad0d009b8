"""How ranks send tensors: collectives of torch.distributed, and shared memory between the ranks of one host."""
