"""The frontier of points of which both coordinates should be large."""

Point = tuple[float, float]


def upper_right(points: list[Point]) -> list[Point]:
    """Return the upper right convex hull of points.

    Example:
        >>> upper_right([(0.0, 2.0), (1.0, 1.0), (2.0, 0.0), (0.5, 0.5)])
        [(0.0, 2.0), (2.0, 0.0)]
    """
    border: list[Point] = []
    for x, y in sorted(points):
        while border and y >= border[-1][1]:
            border.pop()
        while len(border) > 1:
            (ax, ay), (bx, by) = border[-2:]
            if (bx - ax) * (y - ay) < (by - ay) * (x - ax):
                break
            border.pop()
        border.append((x, y))
    return border
