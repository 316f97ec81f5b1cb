"""Write the scenarios' logs to tests/recorded, for `tests/simulation/test_recorded_logs.py` to compare with."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sayso.demo.play import SCENARIOS, record

RECORDED = Path(__file__).parents[1] / "tests" / "recorded"


async def write(name: str, ablation: str | None) -> None:
    """Play one scenario and write its log."""
    lines = await record(name, ablate=ablation)
    file = RECORDED / (f"{name}.log" if ablation is None else f"{name}--{ablation}.log")
    await asyncio.to_thread(file.write_text, "\n".join(lines) + "\n", encoding="utf-8")


async def main() -> None:
    """Write every log."""
    RECORDED.mkdir(exist_ok=True)
    for name, scenario in SCENARIOS.items():
        for ablation in (None, *scenario.ablations):
            await write(name, ablation)


if __name__ == "__main__":
    asyncio.run(main())
