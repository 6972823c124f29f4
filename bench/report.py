"""Figures and how they are shown."""

import math

PHASES = ["prepare", "spawn", "jail", "kernel", "mounts", "ready", "first_byte", "exit", "cleanup", "total"]
PYTHON_GOAL = 0.5
KERNEL_GOAL_MS = 60


def percentile(values, percent):
    """By nearest rank: always a value that was measured."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def summary(values):
    """Milliseconds; nothing if nothing was measured."""
    if not values:
        return None
    ranks = {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
    figures = {"n": len(values), **ranks, "min": min(values)}
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


def table(rows, columns):
    """Lines of `rows[name][column]`; what there is not is a dash."""
    width = max(len(name) for name in rows) + 2
    yield f"  {'':{width}}" + "".join(f"{column:>13}" for column in columns)
    for name, row in rows.items():
        cells = [(row or {}).get(column) for column in columns]
        yield f"  {name:{width}}" + "".join(f"{'-' if cell is None else cell:>13}" for cell in cells)


def verdicts(goals_list):
    """What was promised, and whether it holds."""
    yield "\ngoals"
    for goal in goals_list:
        verdict = "holds" if goal["holds"] else "MISSED"
        bound = goal.get("bound", "at most")
        yield f"  {verdict:7} {goal['goal']}: {goal['measured']} ({bound} {goal['limit']})"


def goal(text, limit, measured):
    """One promise, held against what was measured."""
    return {"goal": text, "limit": limit, "measured": round(measured, 3), "holds": measured <= limit}


def at_least(text, limit, measured):
    """The same for what more of is better."""
    return {"goal": text, "limit": limit, "measured": round(measured, 3), "holds": measured >= limit, "bound": "at least"}


def goals(commands, phases):
    """What docs/spec.md promises of a cold start, held against gVisor at its best."""
    python = commands["python3"]["peers"]
    ratio = max(python[peer]["bathy_ratio"] for peer in ("runsc", "runsc-rw"))
    kernel = percentile([value for by_phase in phases.values() for value in by_phase["kernel"]], 50)
    return [goal("python3: bathy p50 / runsc p50 (the faster row)", PYTHON_GOAL, ratio),
            goal("kernel start to PID 1, p50, ms", KERNEL_GOAL_MS, kernel)]


def lines(result):
    """The result of cold starts for people."""
    for name, command in result["commands"].items():
        yield f"\n{name}: cold start to exit, ms"
        yield from table(command["peers"], ["n", "p50", "p99", "min", "bathy_ratio"])
    for name, command in result["commands"].items():
        yield f"\n{name}: phases of bathy, ms"
        yield from table(command["phases"], ["n", "p50", "p99", "min"])
    yield from verdicts(result["goals"])
