"""The keys of a recipe, a table per module: of all recipes (common), of `sft`, of `script:`.

A key says its kind, its default, one line of help, and whether it may change when a run resumes.
docs/keys.md is made from them with: python -m runspec.keys
"""
