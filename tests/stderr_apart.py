"""A plugin for nbval: what a host's libraries write to stderr while a cell runs is no claim of the notebook."""


def pytest_collection_modifyitems(items):
    for notebook in {item.parent for item in items}:
        notebook.skip_compare += ("stderr",)
