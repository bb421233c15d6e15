"""The table of faults: what was injected, how often, and what came of it."""

from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Rows by fault: times injected, runs lost, whether results were equal."""

    rows: dict[str, list] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def write(self, fault: str, injected: int, whole: list, found: list) -> None:
        """Write down what came of a study, against the one that nobody disturbed: rows, each with its key first."""
        told, known = {row[0]: row for row in found}, {row[0]: row for row in whole}
        lost = len(known.keys() - told.keys())
        equal = told == known and len(found) == len(whole)
        row = self.rows.setdefault(fault, [0, 0, True])
        row[0], row[1], row[2] = row[0] + injected, row[1] + lost, row[2] and equal
        assert lost == 0, f"{lost} runs lost"
        assert equal, "results differ"

    def note(self, line: str) -> None:
        """What else was measured, told below the table."""
        self.notes.append(line)

    def table(self) -> list[str]:
        if not self.rows:
            return []
        lines = ["", "| fault | times injected | runs lost | results equal |", "| --- | ---: | ---: | --- |"]
        for fault, (injected, lost, equal) in self.rows.items():
            lines.append(f"| {fault} | {injected} | {lost} | {'yes' if equal else 'NO'} |")
        return [*lines, "", *self.notes] if self.notes else lines
