"""Tile lists built on the device: no synchronization, captured in a CUDA graph, replayed after the offsets changed."""

from __future__ import annotations

import torch

from jfa.layout import offsets_from_lengths
from jfa.masks import Band
from jfa.schedule import key_tiles, query_tiles, split_tiles, zigzag_list

FIRST = ([130, 0, 1, 64, 700], [20, 300, 0, 64, 511])
SECOND = ([5, 600, 200, 90, 0], [511, 64, 300, 0, 20])
BAND = Band.make(causal=True, window_size=200)


def build(query_offset, key_offset):
    """Run every device-side builder once, as one flat list of tensors."""
    tiles = query_tiles(query_offset, key_offset, 64, 64, total_q=895, band=BAND)
    keys = key_tiles(query_offset, key_offset, 64, 64, total_q=895, total_kv=895, band=BAND)
    lists = [tiles, keys, zigzag_list(tiles, 132)]
    split = split_tiles(tiles, 132, copies=4, least_blocks=2)
    flat = [x for t in lists for x in (t.seq, t.row, t.cost, t.counts)]
    return flat + [split.tile, split.part, split.parts, split.begin, split.end, split.counts]


def offsets(lengths, device):
    """Return the offset tensors of (query lengths, key lengths)."""
    return [offsets_from_lengths(x).to(device) for x in lengths]


def the_device_builds_what_the_host_builds() -> None:
    """Build every list on the GPU and on the CPU: the same numbers."""
    for lengths in (FIRST, SECOND):
        for on_gpu, on_cpu in zip(build(*offsets(lengths, "cuda")), build(*offsets(lengths, "cpu"))):
            assert torch.equal(on_gpu.cpu(), on_cpu)


def building_never_waits_for_the_device() -> None:
    """Build every list while PyTorch raises where a call waits for the device."""
    query_offset, key_offset = offsets(FIRST, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        build(query_offset, key_offset)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def a_captured_graph_follows_the_offsets() -> None:
    """Capture the building in a CUDA graph, change the offsets in place, replay."""
    query_offset, key_offset = offsets(FIRST, "cuda")
    build(query_offset, key_offset)  # warm up outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = build(query_offset, key_offset)
    for lengths in (FIRST, SECOND):
        for device, host in zip((query_offset, key_offset), offsets(lengths, "cpu")):
            device.copy_(host)
        graph.replay()
        torch.cuda.synchronize()
        for on_gpu, on_cpu in zip(lists, build(*offsets(lengths, "cpu"))):
            assert torch.equal(on_gpu.cpu(), on_cpu)


CHECKS = {
    check.__name__: check
    for check in (
        the_device_builds_what_the_host_builds,
        building_never_waits_for_the_device,
        a_captured_graph_follows_the_offsets,
    )
}
"""Checks by name."""
