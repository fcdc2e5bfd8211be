"""T8: what was measured before must not get worse by more than a quarter.

The file maps device -> configuration -> measure -> value: `ratio` (max error / bound), `rho` (RMS error / ideal) and
`inexact` (fraction not correctly rounded), all better when smaller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from .verdict import Verdict

RATCHET = Path(__file__).with_name("ratchet.json")
GROWTH = 1.25
# Growth below this is noise, in a ratio as in a fraction of elements.
FLOOR = 0.01

Records = dict[str, dict[str, dict[str, float]]]


def load(path: Path = RATCHET) -> Records:
    """The records of a ratchet file; none if it does not exist. ValueError if it is not JSON."""
    return json.loads(path.read_text()) if path.exists() else {}


def check(records: Records, device: str, configuration: str, measures: Mapping[str, float]) -> Verdict:
    """Fails when a recorded measure has grown by more than a quarter; "n/a" where nothing is recorded."""
    recorded = records.get(device, {}).get(configuration, {})
    # A measure that is gone, or NaN, has grown without bound.
    now = {name: measures.get(name, math.nan) for name in recorded}
    growth = {name: math.inf if math.isnan(x) else x / max(recorded[name], FLOOR) for name, x in now.items()}
    if not growth:
        return Verdict("T8", "n/a", 0.0, f"nothing recorded for {configuration} on {device}")
    worst = max(growth, key=lambda name: growth[name])
    detail = f"{worst} is {now[worst]:.4g}, recorded {recorded[worst]:.4g}"
    verdict = "fail" if growth[worst] > GROWTH else "pass"
    return Verdict("T8", verdict, growth[worst] / GROWTH, detail)


def renew(device: str, configurations: Mapping[str, Mapping[str, float]], path: Path = RATCHET) -> Records:
    """Write these measures of one device over its recorded ones, on purpose; returns all records."""
    records = load(path)
    own = {**records.get(device, {}), **{name: dict(values) for name, values in configurations.items()}}
    records[device] = dict(sorted(own.items()))
    path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    return records
