"""The proving ground of `trimtab doctor`: sound trainings, the ways people break them, and the score."""
