"""The page: one HTML file that contains everything, for the screen and for printing."""

from gplan.reporting.page.document import page
from gplan.reporting.page.figures import inline_svg

__all__ = ["inline_svg", "page"]
