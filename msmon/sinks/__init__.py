"""Where step tables go. A new output is a new file here, behind :class:`msmon.sinks.base.Sink`."""
