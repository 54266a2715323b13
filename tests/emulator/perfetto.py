"""What Perfetto's importer of Chrome traces relies on and does not check itself."""

import math


def faults(trace) -> list[str]:
    """Return which rules a trace breaks: slices of a thread, ends of flows, counters, names."""
    events = trace["traceEvents"]
    slices, threads = [e for e in events if e["ph"] == "X"], {}
    found = [f"slice {e['name']} has no length" for e in slices if not (e["dur"] > 0 and math.isfinite(e["ts"]))]
    for e in slices:
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for place, spans in threads.items():
        spans.sort()
        found += [f"slices of thread {place} overlap at {b[0]}" for a, b in zip(spans, spans[1:]) if a[1] > b[0] + 1e-6]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    if starts.keys() != ends.keys() or len(starts) != sum(e["ph"] == "s" for e in events):
        found.append("a flow has one end, or two have one number")
    for number in starts.keys() & ends.keys():
        found += _flow(starts[number], ends[number], threads)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"]}
    found += [f"thread {place} has no name" for place in threads if place not in named]
    found += [f"process {pid} has no name" for pid in {p for p, _ in threads} - _processes(events)]
    for e in events:
        if e["ph"] == "C" and not all(isinstance(x, int | float) and math.isfinite(x) for x in e["args"].values()):
            found.append(f"counter {e['name']} has a value that is no number")
    return found


def _flow(start, end, threads):
    """Return what is wrong with a flow: it leads back in time, its ends differ in name, or one lies outside all slices."""
    found = [f"flow {start['id']} leads back in time"] if start["ts"] > end["ts"] else []
    if (start["name"], start["cat"]) != (end["name"], end["cat"]) or end.get("bp") != "e":
        found.append(f"the ends of flow {start['id']} do not belong together")
    for e in (start, end):
        spans = threads.get((e["pid"], e["tid"]), [])
        if not any(a - 1e-6 <= e["ts"] < b for a, b in spans):
            found.append(f"an end of flow {e['id']} lies outside all slices")
    return found


def _processes(events):
    return {e["pid"] for e in events if e["name"] == "process_name"}
