"""A table of injected faults, printed at the end of a test session."""

from dataclasses import dataclass, field


@dataclass
class FaultTable:
    """Rows by fault: times injected, runs lost, whether the results were equal."""

    rows: dict[str, list] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, fault: str, injected: int, expected: list, actual: list) -> None:
        """Add the comparison of a study's rows with an uninterrupted study's; a row starts with its key."""
        expected_by_key, actual_by_key = {row[0]: row for row in expected}, {row[0]: row for row in actual}
        lost = len(expected_by_key.keys() - actual_by_key.keys())
        equal = actual_by_key == expected_by_key and len(actual) == len(expected)
        row = self.rows.setdefault(fault, [0, 0, True])
        row[0], row[1], row[2] = row[0] + injected, row[1] + lost, row[2] and equal
        assert lost == 0, f"{lost} runs lost"
        assert equal, "results differ"

    def note(self, line: str) -> None:
        """Add a line below the table."""
        self.notes.append(line)

    def table(self) -> list[str]:
        if not self.rows:
            return []
        lines = ["", "| fault | times injected | runs lost | results equal |", "| --- | ---: | ---: | --- |"]
        for fault, (injected, lost, equal) in self.rows.items():
            lines.append(f"| {fault} | {injected} | {lost} | {'yes' if equal else 'NO'} |")
        return [*lines, "", *self.notes] if self.notes else lines
