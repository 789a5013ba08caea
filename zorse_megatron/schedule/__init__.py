"""Schedules as data: a plan lowers to one list of actions per rank."""
