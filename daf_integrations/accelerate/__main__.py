"""`accelerate launch -m daf_integrations.accelerate` runs a script with DAF in every Accelerator."""

import sys

from daf_integrations.accelerate.plugin import main

if __name__ == "__main__":
    main(sys.argv[1:])
