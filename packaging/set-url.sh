#!/usr/bin/env bash
# set-url.sh URL TAG: write the repository's URL into the package's metadata, and make the README's links absolute.
# No other file names this URL. publish.yml knows it, and runs this before it builds: PyPI shows no relative link.
set -euo pipefail
cd "$(dirname "$0")/.."
urls="project_urls =\n    Source = $1\n    Documentation = $1/blob/$2/README.md\n    Changelog = $1/blob/$2/CHANGELOG.md\n    Issues = $1/issues"
sed -i "s|^license_files|$urls\n&|" setup.cfg
sed -Ei "s,(!\[[^]]*\]\()([^:)]+)\),\1$1/raw/$2/\2),g; s,\]\(([^#:)][^:)]*)\),]($1/blob/$2/\1),g" README.md
