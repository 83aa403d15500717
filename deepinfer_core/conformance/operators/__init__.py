"""What the kit asks of operators: one file for each group of contracts, and the checks that they share."""
