"""Sound trainings as people write them; every alarm about one of these is a false one."""
