"""What PyTorch does with the same inputs: the other side of the conformance tests.

    python peer.py FOLDER

FOLDER holds `job.json` and `job.bin`, both written by the tests. One process per rank joins a Gloo group, goes through
every run of the job, and leaves `result-RANK.json` and `result-RANK.bin`. A tensor is described by its element type,
size, strides and storage, so that both sides lay it out the same way in memory.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import signal
import sys
from datetime import timedelta

NO_TORCH = 3

try:
    import torch
    import torch.distributed as dist

    import numpy  # noqa: F401, I001  Tensor.numpy() needs it.
except ImportError as error:
    print(f"{sys.executable} cannot import what the comparison needs: {error}", file=sys.stderr)
    sys.exit(NO_TORCH)


class Inputs:
    """The tensors of a job, made anew at each request."""

    def __init__(self, blob):
        self.blob = blob

    def tensor(self, entry):
        dtype = getattr(torch, entry["dtype"])
        raw = bytearray(self.blob[entry["at"] : entry["at"] + entry["bytes"]])
        # The clone is aligned as every tensor is; the buffer of a bytearray need not be.
        storage = torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype) if raw else torch.empty(0, dtype=dtype)
        tensor = storage.as_strided(entry["size"], entry["stride"], entry["offset"])
        if entry["conjugate"]:
            tensor = tensor.conj()
        if entry["negative"]:
            tensor = torch._neg_view(tensor)
        return tensor

    def optional(self, entry):
        return None if entry is None else self.tensor(entry)

    def leaf(self, entry):
        parameter = self.tensor(entry["value"])
        if entry["trainable"]:
            parameter.requires_grad_()
        if entry["gradient"] is not None:
            gradient = self.tensor(entry["gradient"])
            # Nothing can be copied into an expanded tensor, so a gradient of that kind is replaced.
            parameter.grad = gradient.contiguous() if 0 in gradient.stride() else gradient
        return parameter


class Outputs:
    """Raw bytes, one after another, and where each of them lies."""

    def __init__(self):
        self.blob = bytearray()

    def put(self, tensor):
        if tensor is None:
            return None
        raw = logical_bytes(tensor)
        at = len(self.blob)
        self.blob += raw
        return {"at": at, "bytes": len(raw)}


def logical_bytes(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One element counts as contiguous whatever its stride, but can be seen as bytes only where that is 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def sha256(tensor):
    text = str((tensor.shape, tensor.dtype))
    return hashlib.sha256(text.encode() + logical_bytes(tensor)).hexdigest()


def nbytes(tensor):
    return tensor.numel() * tensor.element_size()


def split(tensors, limit):
    """Lists of neighbours of one dtype that fit the limit together; one that is larger stands alone."""
    groups = []
    room = 0
    for tensor in tensors:
        size = nbytes(tensor)
        if not groups or size > room or groups[-1][0].dtype != tensor.dtype:
            groups.append([])
            room = limit
        groups[-1].append(tensor)
        room -= size
    return groups


def through_flat_copy(tensors, collective):
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    dist.barrier()
    collective(flat)
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


def in_pieces(tensors, line, collective):
    small = [tensor for tensor in tensors if nbytes(tensor) < line or tensor.numel() == 0]
    for tensor in tensors:
        if nbytes(tensor) < line or tensor.numel() == 0:
            continue
        dense = tensor.contiguous()
        dist.barrier()
        collective(dense)
        if dense is not tensor:
            tensor.copy_(dense)
    if sum(tensor.numel() for tensor in small) > 0:
        through_flat_copy(small, collective)


def move(tensors, run, collective):
    """Moves all tensors, the way that the run says, and returns the number of buckets."""
    groups = split(tensors, run["bucket_bytes"])
    for group in groups:
        if run["transport"] == "flat":
            through_flat_copy(group, collective)
        else:
            in_pieces(group, run["in_place_bytes"], collective)
    return len(groups)


@torch.no_grad()
def broadcast(parameters, run):
    return move(parameters, run, lambda tensor: dist.broadcast(tensor, src=0))


@torch.no_grad()
def synchronize(parameters, run):
    """Sums what any rank has a gradient for; returns the mask of used parameters and the number of buckets."""
    used = torch.tensor([parameter.grad is not None for parameter in parameters]).to(torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    gradients = []
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return used.tolist(), move(gradients, run, dist.all_reduce)


def differing_names(named):
    """Names that are not the same on all ranks; None where everything is equal."""
    held = {name: tensor if tensor is None else sha256(tensor) for name, tensor in named}
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, held)
    names = sorted({name for other in by_rank for name in other})
    differing = [name for name in names if len({other.get(name, "not listed") for other in by_rank}) > 1]
    return differing or None


def carry_out(run, entries, inputs, outputs):
    parameters = [inputs.leaf(entry) for entry in sorted(entries, key=lambda entry: entry["name"])]
    broadcast_buckets = broadcast(parameters, run)
    used, buckets = synchronize(parameters, run)
    gradients = [parameter.grad for parameter in parameters]
    return {
        "values": [outputs.put(parameter) for parameter in parameters],
        "value_digests": [sha256(parameter) for parameter in parameters],
        "broadcast_buckets": broadcast_buckets,
        "used": [bool(flag) for flag in used],
        "gradients": [outputs.put(gradient) for gradient in gradients],
        "gradient_digests": [None if gradient is None else sha256(gradient) for gradient in gradients],
        "buckets": buckets,
    }


def rank_main(rank, folder, job, inputs):
    signal.alarm(2 * job["seconds"])
    outputs = Outputs()
    own = job["ranks"][rank]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=len(job["ranks"]),
        timeout=timedelta(seconds=job["seconds"] / 2),
    )
    result = {
        "runs": [carry_out(run, own["parameters"], inputs, outputs) for run in job["runs"]],
        "checks": [
            differing_names([(entry["name"], inputs.optional(entry["value"])) for entry in check])
            for check in own["checks"]
        ],
        "digests": [sha256(inputs.tensor(entry)) for entry in own["digests"]],
    }
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"result-{rank}.bin").write_bytes(outputs.blob)
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


def main(folder):
    job = json.loads((folder / "job.json").read_text())
    # A last resort, should the tests end without ending this process.
    signal.alarm(2 * job["seconds"])
    torch.set_num_threads(1)
    inputs = Inputs((folder / "job.bin").read_bytes())
    # Forked, so that torch is imported once; nothing has run in this process that a child could miss.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, folder, job, inputs)) for rank in range(len(job["ranks"]))]
    for process in ranks:
        process.start()
    running = list(ranks)
    while running and all(process.exitcode in (None, 0) for process in ranks):
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
    for process in running:
        process.kill()
    for process in ranks:
        process.join()
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
    if failed:
        print(f"PyTorch {torch.__version__}: ranks {failed} did not finish", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
