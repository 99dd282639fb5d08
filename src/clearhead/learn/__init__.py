"""The lessons' exercises: check what was written, and see which lessons there are."""

from clearhead.learn.checking import Report, check
from clearhead.learn.lessons import Lesson, all_lessons
from clearhead.learn.running import Outcome

__all__ = ["Lesson", "Outcome", "Report", "all_lessons", "check"]
