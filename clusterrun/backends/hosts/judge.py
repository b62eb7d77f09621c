"""Draft."""


def refuse(plan, facts):
    pass


def notes(plan, facts):
    return []


def free_gpus(facts):
    return [gpu["uuid"] or gpu["name"] for gpu in facts["gpus"].get("all", [])]


def twice(name):
    raise NotImplementedError


def too_few_gpus(*a):
    raise NotImplementedError
