"""Figures and how they are shown."""

import math

PHASES = ["prepare", "spawn", "jail", "kernel", "mounts", "ready", "first_byte", "exit", "cleanup", "total"]
PYTHON_GOAL = 0.6
KERNEL_GOAL_MS = 60


def percentile(values, percent):
    """By nearest rank: always a value that was measured."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def summary(values):
    """Milliseconds; nothing if nothing was measured."""
    if not values:
        return None
    figures = {"n": len(values), "p50": percentile(values, 50), "p99": percentile(values, 99), "min": min(values)}
    return {name: round(value, 2) for name, value in figures.items()}


def build(samples, phases):
    """`samples[command][peer]` and `phases[command][phase]` as one result."""
    commands = {}
    for command, by_peer in samples.items():
        rows = {peer: summary(values) for peer, values in by_peer.items()}
        for row in rows.values():
            row["bathy_ratio"] = round(rows["bathy"]["p50"] / row["p50"], 3)
        commands[command] = {
            "peers": rows,
            "phases": {phase: summary(phases[command].get(phase, [])) for phase in PHASES},
        }
    return {"commands": commands, "goals": goals(commands, phases)}


def goals(commands, phases):
    """What docs/design.md promises of a cold start, held against gVisor at its best."""
    python = commands["python3"]["peers"]
    ratio = max(python[peer]["bathy_ratio"] for peer in ("runsc", "runsc-rw"))
    kernel = percentile([value for by_phase in phases.values() for value in by_phase["kernel"]], 50)
    return [
        {"goal": "python3: bathy p50 / runsc p50 (the faster row)", "limit": PYTHON_GOAL,
         "measured": ratio, "holds": ratio <= PYTHON_GOAL},
        {"goal": "kernel start to PID 1, p50, ms", "limit": KERNEL_GOAL_MS,
         "measured": round(kernel, 2), "holds": kernel <= KERNEL_GOAL_MS},
    ]


def lines(result):
    """The result for people."""
    for name, command in result["commands"].items():
        yield f"\n{name}: cold start to exit, ms"
        yield f"  {'':12}{'n':>4}{'p50':>10}{'p99':>10}{'min':>10}{'bathy/peer':>12}"
        for peer, row in command["peers"].items():
            yield f"  {peer:12}{row['n']:4}{row['p50']:10.1f}{row['p99']:10.1f}{row['min']:10.1f}{row['bathy_ratio']:12.2f}"
    for name, command in result["commands"].items():
        yield f"\n{name}: phases of bathy, ms"
        yield f"  {'':12}{'n':>4}{'p50':>10}{'p99':>10}{'min':>10}"
        for phase, row in command["phases"].items():
            if row is None:
                yield f"  {phase:12}   0         -         -         -"
            else:
                yield f"  {phase:12}{row['n']:4}{row['p50']:10.1f}{row['p99']:10.1f}{row['min']:10.1f}"
    yield "\ngoals"
    for goal in result["goals"]:
        verdict = "holds" if goal["holds"] else "MISSED"
        yield f"  {verdict:7} {goal['goal']}: {goal['measured']} (at most {goal['limit']})"
