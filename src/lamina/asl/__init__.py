"""Amazon States Language: parser, linter, semantics, compiler to flows and export. Pure: no clock, no files, no code run."""
