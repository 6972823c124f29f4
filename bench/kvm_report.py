"""The figures of bench/kvm and how they are shown."""

from report import goal, summary, table, verdicts

START_GOAL = 1.0
MEMORY_GOAL_MIB = 10
MIB = 1 << 20
STARTS = {
    "pid1": "VMM's start to PID 1",
    "ready": "VMM's start to the agent's answer",
    "answer": "VMM's start to the end of /bin/true",
    "whole": "the whole command: /bin/true in a new sandbox, and everything gone again",
}
PHASES = ["prepare", "spawn", "jail", "kernel", "mounts", "ready", "exit", "cleanup", "total"]
BLOCKS = ["write", "cold read", "warm read", "random 4 KiB reads"]


def compared(rows):
    """Summaries of `rows[contender]`, each with bathy's p50 by its own."""
    found = {name: summary(values) for name, values in rows.items() if values}
    for row in found.values():
        row["bathy_ratio"] = round(found["bathy"]["p50"] / row["p50"], 3)
    return found


def pick(samples, key):
    return {name: [run[key] for run in runs if key in run] for name, runs in samples.items()}


def build(samples):
    """Everything as one result, from `samples[what][contender]`, a list of runs."""
    start = {key: compared(pick(samples["start"], key)) for key in STARTS}
    blocks = {key: compared(pick(samples["blocks"], key)) for key in BLOCKS if samples["blocks"]["bathy"]}
    memory = {name: {key: summary([run[key] / MIB for run in runs]) for key in ("rest", "page_tables")}
              for name, runs in samples["memory"].items() if runs}
    goals = [goal("VMM's start to PID 1: bathy p50 / QEMU microvm p50", START_GOAL, start["pid1"]["qemu"]["bathy_ratio"])]
    if memory:
        goals.append(goal("memory of the VMM process without the guest's, MiB", MEMORY_GOAL_MIB, memory["bathy"]["rest"]["p50"]))
    return {
        "start_ms": start,
        "phases_ms": {phase: summary([run[phase] for run in samples["phases"]]) for phase in PHASES},
        "greeting_ms": summary([run["greeting"] for run in samples["start"]["qemu"]]),
        "blocks": blocks, "memory_mib": memory, "goals": goals,
    }


def lines(result):
    """The result for people."""
    if outside := result.get("outside"):
        yield f"in the test bed; load of the machine around it: {outside['load_before']} before, {outside['load_after']} after"
    for key, words in STARTS.items():
        yield f"\n{words}, ms"
        yield from table(result["start_ms"][key], ["n", "p50", "p99", "min", "bathy_ratio"])
    yield f"\nQEMU's PID 1 may be told too early, by at most the greeting that asks for it: {result['greeting_ms']['p50']} ms (p50)"
    yield "\nphases of bathy, ms"
    yield from table(result["phases_ms"], ["n", "p50", "p99", "min"])
    for key, rows in result["blocks"].items():
        yield f"\ndisk: {key}, {'per second' if key.startswith('random') else 'MiB/s'} (more is better)"
        yield from table(rows, ["n", "p50", "min", "bathy_ratio"])
    if result["memory_mib"]:
        yield "\nmemory of the VMM process without the guest's, MiB"
        rows = {f"{name}, {key}": row[key] for key in ("rest", "page_tables") for name, row in result["memory_mib"].items()}
        yield from table(rows, ["n", "p50", "min"])
    yield from verdicts(result["goals"])
    for note in result["notes"].values():
        yield f"\n{note}"
