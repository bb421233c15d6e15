"""The one figure of a finding, as its files have it."""

from mooring.paper.context.result import Finding
from mooring.report.picture import Picture, picture
from mooring.report.style import drawing


def rendered(finding: Finding) -> Picture:
    with drawing():
        (drawn,) = finding.draw()
        return picture(drawn, finding.name)
