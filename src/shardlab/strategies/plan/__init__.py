"""Plans: a strategy as a set of fields, and the program that follows any of them. Read `plan`, `resolve`, `rank_plan`,
then `program`."""
