"""Every statistic of every gradient: the reference in torch, numpy on the CPU, Triton kernels on a GPU."""
