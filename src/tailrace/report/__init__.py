"""The report: one HTML file, or Markdown, made of the results of an evaluation."""
