"""Distributions of token lengths and arrivals, fitted to public traces.

Each mixture was fitted to the lengths of one trace and describes it to a Kolmogorov-Smirnov
distance of 0.01 to 0.04, about what the first half of a trace differs from its second. Fits and
checks used the same trace. No trace rows are reproduced; docs/workloads.md lists the sources.

``Joint`` = (weight, mu prompt, mu output, sigma prompt, sigma output, correlation), natural logs.
"""

from tailrace.workload.arrivals import CoxLognormal, Mmpp2, OnOffBatch
from tailrace.workload.lengths import Clip, Joint, JointMixture, Lognormals

#: Azure LLM inference 2023, conversation (19 366 requests).
CHAT = JointMixture(
    components=(
        Joint(0.0759, 8.3158, 4.0353, 0.0213, 0.4981, 0.013),
        Joint(0.2811, 6.9744, 6.0074, 0.0695, 0.0545, -0.013),
        Joint(0.0951, 5.2909, 4.9869, 0.089, 0.3838, -0.246),
        Joint(0.1125, 7.5318, 4.3286, 0.4902, 0.4207, 0.192),
        Joint(0.0533, 4.6944, 3.9983, 1.2361, 1.0987, -0.473),
        Joint(0.2432, 5.9893, 4.5405, 0.0463, 0.2538, 0.367),
        Joint(0.0848, 7.0819, 5.8138, 0.1137, 0.5825, -0.804),
        Joint(0.0541, 7.0925, 4.6652, 0.5929, 0.2268, 0.391),
    ),
    prompt=Clip(2, 14_050),
    output=Clip(7, 1000),
)

#: ShareGPT first turns (10 000 lengths).
ONESHOT = JointMixture(
    components=(
        Joint(0.0742, 7.0515, 4.4438, 0.7355, 1.4385, 0.269),
        Joint(0.3182, 4.674, 6.0613, 1.4857, 0.4741, 0.101),
        Joint(0.2252, 3.7809, 4.241, 1.6043, 1.0497, 0.613),
        Joint(0.3825, 2.8734, 5.6891, 0.6039, 0.5731, 0.291),
    ),
    prompt=Clip(1, 3973),
    output=Clip(3, 1050),
)

#: Azure LLM inference 2023, code (8 819 requests); 4 % of the prompts lie at the context limit.
CODE = JointMixture(
    components=(
        Joint(0.3833, 7.6125, 2.2492, 0.6407, 0.3188, 0.07),
        Joint(0.1074, 5.8742, 4.1613, 1.5522, 1.016, 0.489),
        Joint(0.2655, 7.5505, 3.2926, 0.6844, 0.6922, 0.078),
        Joint(0.2437, 5.5983, 2.4891, 1.2713, 0.4268, 0.128),
    ),
    prompt=Clip(3, 7437),
    output=Clip(6, 1899),
    cap_chance=0.0399,
    cap=Clip(7430, 7437),
)

#: arXiv summarisation lengths in a 4k window, as processed by Vidur (28 257 lengths).
SUMMARISE = JointMixture(
    components=(
        Joint(0.0398, 5.6411, 7.8435, 1.1427, 0.3043, -0.351),
        Joint(0.2428, 8.1843, 5.1826, 0.0648, 0.4417, -0.348),
        Joint(0.292, 7.985, 5.0935, 0.1352, 0.6129, -0.323),
        Joint(0.294, 7.6722, 5.0428, 0.2219, 0.5451, -0.194),
        Joint(0.0074, 3.4214, 6.2084, 2.712, 1.6785, -0.754),
        Joint(0.1241, 7.1832, 4.8515, 0.4592, 0.6816, -0.327),
    ),
    prompt=Clip(1, 4054),
    output=Clip(5, 4056),
)

#: ServeGen deepseek-r1 (one day, 73 clients); thinking tokens are part of the output.
REASONING = JointMixture(
    components=(
        Joint(0.1632, 3.9917, 8.2556, 0.798, 0.7226, 0.135),
        Joint(0.175, 6.031, 5.9509, 0.9472, 0.3567, -0.569),
        Joint(0.0379, 9.6856, 7.0946, 0.4659, 0.4358, 0.079),
        Joint(0.0323, 7.9646, 6.687, 0.7411, 1.2596, -0.774),
        Joint(0.2475, 5.8549, 6.3981, 1.601, 0.7222, 0.044),
        Joint(0.1558, 5.5984, 6.5662, 0.3209, 0.6867, -0.632),
        Joint(0.122, 3.0775, 7.2097, 0.5321, 0.1879, 0.067),
        Joint(0.0664, 3.1097, 6.2794, 0.5724, 0.36, -0.647),
    ),
    prompt=Clip(1, 57_284),
    output=Clip(1, 32_768),
)

#: Mooncake synthetic (3 993 requests), by class.
DOCUMENT_SHORT = JointMixture(
    components=(
        Joint(0.2339, 4.1132, 3.817, 0.9667, 1.2402, 0.11),
        Joint(0.3716, 4.6946, 5.8092, 0.8357, 0.4832, 0.0),
        Joint(0.3945, 3.2838, 5.5007, 0.2908, 0.608, 0.26),
    ),
    prompt=Clip(13, 511),
    output=Clip(1, 893),
)
DOCUMENT_SINGLE = JointMixture(
    components=(
        Joint(0.3111, 9.9445, 5.4233, 0.3383, 0.4363, 0.442),
        Joint(0.2284, 7.1106, 5.8116, 0.632, 0.5663, -0.31),
        Joint(0.1457, 8.8639, 3.1469, 1.5883, 1.7235, 0.297),
        Joint(0.3149, 9.6951, 5.5805, 0.1171, 0.2895, 0.094),
    ),
    prompt=Clip(512, 191_378),
    output=Clip(1, 893),
)
DOCUMENT = JointMixture(
    components=(
        Joint(0.0507, 7.1115, 3.8447, 3.0727, 1.7352, -0.129),
        Joint(0.2407, 8.381, 3.3514, 0.3929, 1.3182, 0.353),
        Joint(0.36, 9.7615, 3.3596, 0.2975, 1.3876, 0.171),
        Joint(0.3486, 10.5637, 1.7904, 0.2764, 0.8416, 0.393),
    ),
    prompt=Clip(600, 130_000),
    output=Clip(1, 893),
)

#: Mooncake conversation (12 031 requests): text of a first turn, of later turns, and answers.
TALK_PROMPT_CAP = 126_195
TALK_FIRST = Lognormals(
    (
        (0.1068, 2.9483, 0.2796),
        (0.2463, 6.011, 1.4778),
        (0.1665, 8.4026, 0.4269),
        (0.4804, 9.5331, 0.804),
    ),
    Clip(1, TALK_PROMPT_CAP),
)
TALK_USER = Lognormals(
    ((0.6176, 2.4509, 1.2624), (0.2619, 5.9104, 1.9048), (0.1205, 8.592, 0.5231)),
    Clip(1, TALK_PROMPT_CAP),
)
TALK_OUTPUT = Lognormals(
    ((0.2508, 3.5226, 1.5226), (0.3119, 5.7708, 0.6201), (0.4372, 6.0666, 0.2572)),
    Clip(1, 2000),
)

#: Two tool prompts in Mooncake's arXiv trace (514 requests): private tails and answers.
TOOL_A_TAIL = Lognormals(
    ((0.2164, 3.2852, 0.1787), (0.2398, 5.5196, 1.1441), (0.5438, 6.6775, 0.4851)),
    Clip(20, 3000),
)
TOOL_A_OUTPUT = Lognormals(((1.0, 3.411, 0.254),), Clip(1, 2000), atom=(0.612, 3))
TOOL_B_TAIL = Lognormals(
    ((0.8105, 6.3821, 0.1292), (0.1895, 7.3843, 0.139)),
    Clip(400, 2100),
)
TOOL_B_OUTPUT = Lognormals(((1.0, 2.994, 0.139),), Clip(1, 2000))

#: Azure conversation: locally Poisson, but the rate wanders over minutes. A renewal process of the
#: same CV (1.09) has an index of dispersion near 1 at 60 s, where the trace has 16.
CHAT_ARRIVALS = CoxLognormal(relative_sd=0.26, tau_s=190.0)

#: Typical day of ServeGen's m-large: peaks of twice the mean, clients of CV 2.2 (upper quartile).
BURSTY_ARRIVALS = Mmpp2(high=2.0, low=0.6667, mean_high_s=60.0, mean_low_s=180.0, cv=2.2)

#: Azure code: nothing arrives in 72 % of the time, which is what makes its CV 13.
CODE_ARRIVALS = OnOffBatch(
    on_shape=2.58,
    on_mean_s=16.7,
    off_mu=3.275,
    off_sigma=0.988,
    rate_sigma=0.38,
    length_rate_correlation=0.42,
    jitter_sd=0.62,
    jitter_tau_s=1.5,
    batch_mean=1.35,
    batch_spread_s=0.008,
)

#: Requests by hour of the day over the day's mean: ServeGen deepseek-r1 (1 day).
HOURLY_SWINGING = (
    *(1.21, 1.39, 2.03, 1.79, 1.06, 0.91, 0.75, 0.58, 0.6, 0.66, 0.81, 0.83),
    *(0.45, 0.54, 0.68, 0.7, 0.88, 0.55, 0.75, 0.59, 1.24, 1.62, 2.19, 1.18),
)
