"""The keys of a recipe: common, of all recipes and of `script:`; fields and train, of the
kit's training methods; sft, of one method.

A key says its kind, its default, one line of help, and whether it may change when a run resumes.
docs/keys.md is made from them with: python -m benchmarks.reference keys
"""
