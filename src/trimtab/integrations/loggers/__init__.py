"""Experiment loggers: what a guard records, and histograms, in the run that you already log to."""

from trimtab.integrations.loggers.histogram_log import HistogramLog, log_histograms
from trimtab.integrations.loggers.known_loggers import sink_for

__all__ = ["HistogramLog", "log_histograms", "sink_for"]
