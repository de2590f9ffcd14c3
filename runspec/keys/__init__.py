"""The keys of a recipe: common, of all recipes and of `script:`; sft, of the kit's trainer.

A key says its kind, its default, one line of help, and whether it may change when a run resumes.
docs/keys.md is made from them with: python -m runspec.keys
"""
