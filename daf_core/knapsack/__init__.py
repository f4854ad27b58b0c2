"""One option for each item within a budget: precisions of sites, treatments of blocks, units of an elastic step."""
