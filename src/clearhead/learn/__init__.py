"""The lessons' exercises: what to write, the checks of it, and how far the learner is."""

from clearhead.learn.checking import Report, check
from clearhead.learn.exercise import Exercise, Wrong, unchanged
from clearhead.learn.lessons import Lesson, all_lessons
from clearhead.learn.running import Outcome

__all__ = ["Exercise", "Lesson", "Outcome", "Report", "Wrong", "all_lessons", "check", "unchanged"]
