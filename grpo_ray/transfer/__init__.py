"""The weights on their way from the Learner to the engines: packing, shared memory, wires."""
