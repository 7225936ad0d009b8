"""Where the figures of devices, links and nodes were looked up: pages, and paths in repositories, that anyone can open.

Few are their makers' own data sheets: most are pages that quote them. What was found nowhere says "not looked up".
"""

from __future__ import annotations

ACCELERATORS = "github.com/stas00/ml-engineering compute/accelerator/README.md"
NETWORK = "github.com/stas00/ml-engineering network/README.md"
GPUS = "github.com/jax-ml/scaling-book gpus.md"
TPUS = "github.com/jax-ml/scaling-book tpus.md"
THROUGHPUT = "github.com/Lightning-AI/pytorch-lightning src/lightning/fabric/utilities/throughput.py"
TORCHTITAN = "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
ROCM = "github.com/ROCm/ROCm docs/conceptual/gpu-arch/mi300.md and docs/reference/gpu-arch-specs.rst"
DELL = "manualshelf.com, Dell, high-performance-computing-solution-resources, reference-guide-english, page 17"
HGX_B300 = "fibermall.com/blog/?p=17161"
TPU_V4 = "docs.cloud.google.com/tpu/docs/v4"
TPU_V5P = "docs.cloud.google.com/tpu/docs/v5p"
TPU_V5E = "docs.cloud.google.com/tpu/docs/v5e"
TPU_V6E = "docs.cloud.google.com/tpu/docs/v6e"
DEEPSEEK = "DeepSeek-AI 2024, arXiv 2412.19437"

P100 = (
    f"SXM2: teckknow.com/nvidia-unveils-tesla-p100-hpc-board-based-pascal-gpu-architecture; memory: {DELL}; SMs: "
    "techrival.com/nvidia-volta-tesla-v100-cards-detailed-150w-single-slot-300w-dual-slot-gv100-powered-pcie-accelerators"
)
V100 = f"peaks of SXM2: {THROUGHPUT}; memory, SMs: {GPUS}"
A100 = f"glennklockwood.com/garden/processors/A100; also {ACCELERATORS}, {GPUS}"
A100_PCIE = "memory: thundercompute.com/blog/nvidia-a100-specs-full-guide; all else as SXM4"
H100 = f"SXM5: glennklockwood.com/garden/processors/h100; also {ACCELERATORS}, {GPUS}"
H100_PCIE = "archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
H100_96GB = f"HBM2e, 2.4 TB/s, 500 W: {TORCHTITAN}; peaks, SMs: as h100"
H200 = f"{ACCELERATORS}, {GPUS}; float64: as h100"
H800 = "float64, and otherwise as h100: tumgag.com/tag/nvidia%20h100"
H20 = (
    "float16: github.com/pytorch/torchtitan torchtitan/tools/utils.py; size of memory: ke60.top/article/1471038.html; "
    "all else: zangshuxian.com/new/674733024499207168"
)
B200 = f"{ACCELERATORS}; float64, float32: an eighth of an HGX B200's, {HGX_B300}; SMs: {GPUS}"
GB200 = f"one of a superchip's two: {ACCELERATORS}; float64, SMs: hmc-tech.com/gpus/nvidia-b200-vs-nvidia-gb200"
B300 = (
    f"{ACCELERATORS}; float64, float32: an eighth of an HGX B300's, {HGX_B300}; memory that can be used: "
    "verda.com/blog/gb300-nvl72-architecture; SMs: as b200, not looked up"
)
T4 = f"peaks: {THROUGHPUT}; memory, SMs: sysrqmts.com/en/gpus/nvidia/tesla/t4"
A10 = f"peaks: {THROUGHPUT}; memory, SMs: sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000"
L4 = (
    f"peaks: {THROUGHPUT}; memory: fpsbench.com/compare/gpu/nvidia-l4-vs-nvidia-tesla-m40; "
    "SMs: its 7,424 cores, 128 an SM (its own count, 60, does not give the peak)"
)
L40S = f"{ACCELERATORS}; SMs (18,176 cores, 128 an SM): technical.city/en/video/Tesla-T4-vs-L40S"
RTX_4090 = "sums in float32: waredb.com/processor/nvidia-geforce-rtx-4090; SMs: its 16,384 cores, 128 an SM"
MI300X = ROCM
MI325X = (
    f"memory: {ACCELERATORS}, {ROCM}; peaks, as mi300x: "
    "docs.vultr.com/inference-cookbook/rocm/getting-started/hardware-requirements"
)
MI355X = f"{ACCELERATORS}; compute units: rocm.docs.amd.com/en/7.13.0-preview/reference/gpu-specs.html"

INFINIBAND = f"4 lanes of a port: {NETWORK}, InfiniBand"
INFINITY_FABRIC = f"7 links, one to each peer: {NETWORK}, Infinity Fabric"
EFA = f"one interface: {NETWORK}, inter-node networking, after AWS's instance types"
PCIE = f"16 lanes, 128b/130b; rounded in {NETWORK}, PCIe"
BY_NAME = "its name's rate"

DGX_1 = (
    "8 V100 as a hybrid cube mesh, four NICs of 100 Gb/s: iitr.ac.in/dgx and leslivresblancs.fr/livre/"
    "informatique-et-logiciels/intelligence-artificielle/nvidia-dgx-1-tesla-v100-system, after NVIDIA's white paper"
)
DGX_A100 = "Narayanan et al. 2021, arXiv 2104.04473, section 5: NVSwitch, eight NICs of 200 Gb/s for the application"
DGX_H100 = f"DGX H100: NVSwitch, eight NICs of 400 Gb/s; {NETWORK}, after NVIDIA's DGX H100/H200 user guide"
FOUR_GPUS = "a server of four GPUs; not looked up"
EIGHT_GPUS = "a server of eight GPUs; not looked up"
