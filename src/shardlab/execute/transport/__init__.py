"""Transport of tensors between ranks: collectives of torch.distributed, and shared memory within a host.

Read `collectives` first: the verbs of a transport, and the choice of a transport for each group. Then read the two
implementations, `torch_transport`, and `shared_transport` on the connections of `neighbours`. `process_group` registers
shared memory as a backend of torch.distributed, and `trial` calls each collective on a few numbers.
"""
