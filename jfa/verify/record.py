"""The result file: the outcome of every job, saved after each, so that a later call continues where one stopped.

It is a result file of `jfa bench` as well ("environment", "ceilings", "timings"), with more beside these. Nothing in it names the
machine or its user: the home folder is written "~".
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from jfa.bench import cli as bench_cli
from jfa.bench import runner
from jfa.verify import predictions
from jfa.verify.pool import BAD, LEFT_OUT, RIGHT, Job, Outcome
from jfa.verify.predictions import Prediction

FORMAT = "jfa verify 1"
SAVE_SECONDS = 2.0
SAME = ("device", "jfa", "sources", "torch", "triton", "cuda", "driver")  # what all outcomes of one file share


class AnotherMachine(ValueError):
    """Raised when the file's outcomes come from another GPU, or from other versions."""


def environment(device: str) -> dict[str, Any]:
    """Return where results come from: `jfa bench`'s facts, the GPU's size, the host's processor, and a hash of jfa's sources."""
    facts: dict[str, Any] = runner.environment(torch.device(device))
    facts["sources"] = sources()
    facts["python"], facts["system"] = platform.python_version(), f"{platform.system()} {platform.machine()}"
    facts["cores"] = os.cpu_count()
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        facts["capability"] = f"sm_{found.major}{found.minor}"
        facts["multiprocessors"], facts["memory_gib"] = (
            found.multi_processor_count,
            round(found.total_memory / 2**30, 1),
        )
    return facts


def sources(folder: Path = Path(__file__).parents[1]) -> str:
    """Return the first 16 digits of a SHA-256 over all Python files of a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:16]


class Record:
    """A result file that is being written."""

    def __init__(self, path: Path, content: dict[str, Any]):
        self.path, self.content = path, content
        self.saved = 0.0

    @classmethod
    def open(cls, path: Path, facts: dict[str, Any], fresh: bool = False) -> Record:
        """Continue a file, or begin one.

        Raises:
            AnotherMachine: naming what differs.
            ValueError: the file is something else.
        """
        if path.exists() and not fresh:
            record = cls.read(path)
            old = record.content["environment"]
            other = [
                f"{key} {old.get(key)} there, {facts.get(key)} here" for key in SAME if old.get(key) != facts.get(key)
            ]
            if other:
                raise AnotherMachine("; ".join(other))
            return record
        return cls(path, {"format": FORMAT, "environment": facts, "calls": [], "outcomes": {}, "timings": []})

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file and check its form. Raises OSError or ValueError."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is no result file of this version of jfa verify")
        return cls(path, content)

    def begin(self, **facts: Any) -> None:
        """Note a call of `jfa verify`."""
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.content["calls"].append({"started": started, "seconds": 0.0, **facts})

    def has(self, job: Job) -> bool:
        """Return whether a job was run."""
        return self.content["outcomes"].get(job.key, {"state": LEFT_OUT})["state"] != LEFT_OUT

    def forget(self, key: str) -> None:
        """Drop an outcome, so that its job runs again."""
        self.content["outcomes"].pop(key, None)

    def note(self, job: Job, outcome: Outcome) -> None:
        """Add an outcome and save the file, at most every few seconds."""
        entry = {k: v for k, v in asdict(outcome).items() if v not in ("", None)}
        entry["seconds"], entry["at"] = round(outcome.seconds, 2), round(outcome.at or time.time(), 1)
        for key in ("message", "detail"):
            if key in entry:
                entry[key] = entry[key].replace(str(Path.home()), "~")
        self.content["outcomes"][job.key] = entry
        if time.time() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file atomically: a reader sees the old one or the new one."""
        self.saved = time.time()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    # ------------------------------------------------------------------------------------------------ what follows from it

    def finish(self, planned: list[Job], predicted: list[Prediction], seconds: float) -> None:
        """Derive timings, ratios, the comparison with predictions and the first failure; save."""
        outcomes, content = self.content["outcomes"], self.content
        content["calls"][-1]["seconds"] = round(seconds, 1)
        content["not_run"] = [job.key for job in planned if not self.has(job)]
        content["timings"] = [t for o in self._of("time") if o["state"] == RIGHT for t in o["value"]]
        for kind, name in (("ceilings", "ceilings"), ("host", "host_us")):
            found = [o["value"] for o in self._of(kind) if o["state"] == RIGHT]
            content.update({name: found[-1]} if found else {})
        content["ratios"] = ratios(content["timings"])
        content["predictions"] = predictions.compare(predicted, content["timings"], content["environment"]["device"])
        content["first_failure"] = first_failure(outcomes)
        self.save()

    def _of(self, kind: str) -> list[dict]:
        return [o for key, o in self.content["outcomes"].items() if key.split(":")[0] == kind]

    @property
    def failures(self) -> list[tuple[str, dict]]:
        """(key, outcome) of everything that is wrong, the first one first."""
        bad = [(key, o) for key, o in self.content["outcomes"].items() if o["state"] in BAD]
        return sorted(bad, key=lambda pair: pair[1]["at"])

    def summary(self) -> str:
        """Return what a reader wants to know, as text."""
        content = self.content
        env = content["environment"]
        where = ", ".join(f"{key} {env[key]}" for key in ("driver", "torch", "triton", "jfa", "date") if key in env)
        parts = [f"{env['device']}, {where}", checks_table(content["outcomes"])]
        parts += [f"not offered or not run here: {sentence}" for sentence in self._refusals()]
        if content.get("host_us"):
            parts.append(host_table(content["host_us"]))
        if content["timings"]:
            parts.append(bench_cli.table(content))
        if content.get("predictions"):
            parts.append(predictions.table(content["predictions"]))
        if content.get("not_run"):
            parts.append(f"not yet run: {len(content['not_run'])} jobs; the same command continues")
        parts.append(self._failure_text())
        return "\n\n".join(parts)

    def _refusals(self) -> list[str]:
        said = list(self.content.get("backends", {}).values())
        return list(dict.fromkeys(sentence for sentence in said if sentence))

    def _failure_text(self) -> str:
        if not self.failures:
            return "nothing failed"
        key, outcome = self.failures[0]
        lines = [f"{len(self.failures)} failed; first: {key}, {outcome['state']}: {outcome.get('message', '')}"]
        lines.append(f"alone: jfa verify --again --only '{key}'")
        return "\n".join(lines)


def first_failure(outcomes: dict[str, dict]) -> dict | None:
    """Return the outcome of the job that failed first, with its key; None where nothing failed."""
    bad = [{"key": key, **o} for key, o in outcomes.items() if o["state"] in BAD]
    return min(bad, key=lambda o: o["at"], default=None)


def ratios(timings: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {shape: {"forward": {peer: time of the peer / time of ours}}}; ours is the first of a shape, all from one process."""
    found: dict[str, dict] = {}
    ours: dict[str, dict] = {}
    for t in timings:
        mine = ours.setdefault(t["shape"], t)
        for way in ("forward", "backward"):
            if t is not mine and t[f"{way}_ms"] and mine[f"{way}_ms"]:
                ratio = round(t[f"{way}_ms"] / mine[f"{way}_ms"], 4)
                found.setdefault(t["shape"], {}).setdefault(way, {})[t["name"]] = ratio
    return found


def checks_table(outcomes: dict[str, dict]) -> str:
    """Return problems judged and jobs failed, by kind and backend."""
    rows: dict[tuple[str, str], Counter] = {}
    for key, o in outcomes.items():
        kind, backend, _ = key.split(":", 2)
        row = rows.setdefault((kind, backend), Counter())
        row["failed" if o["state"] in BAD else o["state"]] += 1
        row["problems"] += o["value"] if o["state"] == RIGHT and isinstance(o.get("value"), int) else 0
    lines = [f"{'check':10} {'backend':10} {'right':>6} {'failed':>6} {'refused':>7} {'problems':>8}"]
    for (kind, backend), row in rows.items():
        cells = f"{row[RIGHT]:6} {row['failed']:6} {row['refused']:7} {row['problems'] or '':>8}"
        lines.append(f"{kind:10} {backend:10} {cells}")
    return "\n".join(lines)


def host_table(times: dict[str, dict[str, float]]) -> str:
    """Return microseconds per small call on the host, and the ratio to FlashAttention 2's where that is there."""
    from jfa.bench.host_time import table

    return table(times)
