"""How ranks send tensors: collectives of torch.distributed, and shared memory between the ranks of one host.

Read `collectives` (the verbs of a transport, and the choice of one for each group), then the two implementations:
`torch_transport`, and `shared_transport` on the connections of `neighbours`. `process_group` registers shared memory as
a backend of torch.distributed, and `trial` calls each collective on a few numbers.
"""
