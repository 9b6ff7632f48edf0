"""From tasks to Slang, and from Slang to SPIR-V."""
