"""An OpenAI-compatible server whose requests a `CDBManager` runs: `hf-cdb serve MODEL`.

Needs the packages of `pip install 'hf-cdb[serve]'`; nothing outside of this package imports them.
"""
