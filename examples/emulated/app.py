"""Three models on GPUs that are not there: functions named like recorded profiles, for `lamina serve --emulate`.

    lamina serve examples/emulated/app.py --emulate h200x2 --profiles profiles/h200
    lamina load http://127.0.0.1:8700/v1/functions/resnet50 --rate 500 --body '{"image": "x"}'

A batch takes as long as it was measured to take on an H200, and answers null: queues, batches, slices, admission and metrics are
the server's own. A real app has its models here.
"""

import lamina

app = lamina.App("emulated")


@app.function(slo="25ms", batch=32, gpu=lamina.GPU("1/2", required=True), scale=lamina.Scale(min=1))
def resnet50(image):
    raise NotImplementedError("emulated")


@app.function(slo="50ms", batch=16, gpu=lamina.GPU("1/3", required=True), scale=lamina.Scale(min=1))
def bert_base(text):
    raise NotImplementedError("emulated")


@app.function(slo="25ms", batch=32, gpu=lamina.GPU("1/4", required=True))
def mobilenet_v3_large(image):
    raise NotImplementedError("emulated")


@app.workflow(slo="100ms")
def describe(image):
    return bert_base(resnet50(image))
