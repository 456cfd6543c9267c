"""One rank of PyTorch, for the bench: does on command what the Rust ranks are compared with, and prints the seconds.

Usage: peer.py RANK WORLD_SIZE STORE_FILE. Commands come on standard input, a line each:
    reference WORKLOAD         the steps of the reference: mask, flat buckets with barriers, copies back
    ddp WORKLOAD VIEW SYNC     one forward and backward under DistributedDataParallel (VIEW and SYNC: 0 or 1)
    check WORKLOAD             the reference's comparison of replicas: SHA-256 of every tensor, gathered digests
"""

import contextlib
import hashlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BUCKET = 32 * 1024 * 1024


def shapes(workload):
    """The same as in workload.rs."""
    return {
        "full": [(1024, 1024)] * 64,
        "lora": [(128, 256)] * 192,
        "small": [(64,), (64, 64)] * 500,
    }[workload]


class Parameters(torch.nn.Module):
    def __init__(self, workload):
        super().__init__()
        self.list = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes(workload)])

    def forward(self):
        return sum(parameter.sum() for parameter in self.list)


def in_buckets(tensors):
    bucket, size = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def reference_step(parameters, control):
    mask = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=control)
    used = [parameter.grad for parameter, bit in zip(parameters, mask.tolist()) if bit]
    for bucket in in_buckets(used):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.barrier(group=control)
        dist.all_reduce(flat)
        offset = 0
        for gradient in bucket:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()


def reference_check(parameters, control):
    digests = []
    for index, parameter in enumerate(parameters):
        tensor = parameter.detach().cpu().contiguous()
        digest = hashlib.sha256(str((tensor.shape, tensor.dtype)).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        digests.append((str(index), digest.hexdigest()))
    everywhere = [None] * dist.get_world_size(control)
    dist.all_gather_object(everywhere, digests, group=control)
    assert all(other == everywhere[0] for other in everywhere)


class Peer:
    def __init__(self):
        self.control = dist.new_group(backend="gloo")
        self.plain = {}
        self.wrapped = {}

    def parameters(self, workload):
        if workload not in self.plain:
            module = Parameters(workload)
            for parameter in module.list:
                parameter.grad = torch.ones_like(parameter)
            self.plain[workload] = list(module.list)
        return self.plain[workload]

    def reference(self, workload):
        parameters = self.parameters(workload)
        for parameter in parameters:
            parameter.grad.fill_(1.0)
        return self.timed(lambda: reference_step(parameters, self.control))

    def check(self, workload):
        parameters = self.parameters(workload)
        return self.timed(lambda: reference_check(parameters, self.control))

    def ddp(self, workload, view, sync):
        key = (workload, view)
        if key not in self.wrapped:
            self.wrapped[key] = DistributedDataParallel(Parameters(workload), gradient_as_bucket_view=view == "1")
            self.wrapped[key]().backward()
        model = self.wrapped[key]
        # In place, so that neither kind of step allocates gradients: the difference is the synchronization alone.
        model.zero_grad(set_to_none=False)

        def step():
            with contextlib.nullcontext() if sync == "1" else model.no_sync():
                model().backward()

        return self.timed(step)

    def timed(self, work):
        dist.barrier(group=self.control)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def main():
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    peer = Peer()
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        print(getattr(peer, command)(*arguments), flush=True)


main()
