"""From sources to batches, in numpy alone: records -> tokens -> examples -> rows -> batches."""
