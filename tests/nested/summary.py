"""What all machines found, put together: results.json, summary.txt, and a line for each suite."""

import json
from pathlib import Path


def count(tests):
    passed = sum(test["outcome"] == "passed" for test in tests)
    ignored = sum(test["outcome"] == "ignored" for test in tests)
    hung = sum(test["hung"] for test in tests)
    seconds = round(sum(test["seconds"] for test in tests), 1)
    return {"passed": passed, "failed": len(tests) - passed - ignored, "ignored": ignored, "hung": hung, "seconds": seconds}


def line(name, counts):
    ignored = f", {counts['ignored']} ignored" if counts["ignored"] else ""
    hung = f", {counts['hung']} hung at first" if counts["hung"] else ""
    return f"{name}: {counts['passed']} passed, {counts['failed']} failed{ignored}{hung}, {counts['seconds']:.0f} s"


def summarize(out):
    """0 if there were tests and all of them passed."""
    results = Path(out) / "results"
    parts = [json.loads(path.read_text()) for path in sorted(results.glob("results-*.json"))]
    tests = [test for part in parts for test in part["tests"]]
    engine = parts[0]["engine"] if parts else "auto"
    suites = []
    for suite in json.loads((Path(out) / "plan.json").read_text()):
        of_suite = [test for test in tests if test["suite"] == suite["name"]]
        suites.append({"suite": suite["name"], "tests": of_suite} | count(of_suite))
    lines = [line(f"{suite['suite']} ({engine})", suite) for suite in suites]
    total = count(tests)
    lines.append(line(f"all ({engine})", total))
    (results / "results.json").write_text(json.dumps({"engine": engine, "suites": suites}, indent=1))
    (results / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    # A suite of which nothing ran was not tested.
    return 1 if total["failed"] or not all(suite["tests"] for suite in suites) else 0
