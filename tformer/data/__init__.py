"""From sources to batches, with numpy only: records -> tokens -> examples -> rows -> batches."""
