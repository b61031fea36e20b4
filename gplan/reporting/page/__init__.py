"""The page: one HTML file with everything in it, to be looked at, pointed at and printed."""

from gplan.reporting.page.document import page
from gplan.reporting.page.figures import inline_svg

__all__ = ["inline_svg", "page"]
