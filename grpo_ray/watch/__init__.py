"""The watch over a run: metrics, clocks, open calls, the console, detectors, trackers, the timeline."""
