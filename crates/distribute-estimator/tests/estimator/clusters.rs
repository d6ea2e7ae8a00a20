//! Estimators as tasks of a cluster.

use super::*;

#[test]
fn alone_it_evaluates_at_checkpoints_and_at_the_end() {
    let labels = Column::from(prices());
    for (throttle, evaluations) in [(Duration::ZERO, 4), (Duration::from_secs(3600), 2)] {
        let folder = tempfile::tempdir().unwrap();
        let config = RunConfig::new(folder.path()).save_checkpoints_steps(5).train_distribute(&mirrored(2));
        let regressor = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
        let train = TrainSpec::new(forever(&labels)).max_steps(20);
        let eval = EvalSpec::new(once(&labels)).throttle(throttle);
        for resolver in
            [resolver(""), resolver(r#"{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}"#)]
        {
            let scores = train_and_evaluate_as(&resolver, &regressor, &train, &eval).unwrap().unwrap();
            assert_eq!(scores["global_step"], 20.0);
        }
        let files = std::fs::read_dir(folder.path().join("eval")).unwrap().count();
        // The second call has nothing to train, and evaluates once.
        assert_eq!(files, evaluations + 1);
    }
}

const EVALUATOR: &str =
    r#"{"cluster": {"chief": ["a:1"], "evaluator": ["b:1"]}, "task": {"type": "evaluator", "index": 0}}"#;
const CHIEF: &str = r#"{"cluster": {"chief": ["a:1"], "evaluator": ["b:1"]}, "task": {"type": "chief", "index": 0}}"#;

#[test]
fn an_evaluator_follows_until_the_last_checkpoint() {
    let labels = Column::from(prices());
    // Until max_steps, and until the data end at a step that was saved already.
    for max_steps in [Some(20), None] {
        let folder = tempfile::tempdir().unwrap();
        let regressor = || {
            let config = RunConfig::new(folder.path()).save_checkpoints_steps(4);
            let config = config.wait_for_checkpoints(Duration::from_secs(60), Duration::from_secs(60));
            LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap()
        };
        let input = || Ok(batches(labels.clone()).repeat(if max_steps.is_some() { 100 } else { 2 }));
        let spec = || {
            let spec = TrainSpec::new(input);
            if let Some(steps) = max_steps { spec.max_steps(steps) } else { spec }
        };
        let eval = || EvalSpec::new(once(&labels)).start_delay(Duration::ZERO).throttle(Duration::ZERO);
        let scores = std::thread::scope(|threads| {
            let evaluator =
                threads.spawn(|| train_and_evaluate_as(&resolver(EVALUATOR), &regressor(), &spec(), &eval()));
            let trained = train_and_evaluate_as(&resolver(CHIEF), &regressor(), &spec(), &eval()).unwrap();
            assert!(trained.is_none(), "the chief leaves evaluation to the evaluator");
            evaluator.join().unwrap().unwrap().unwrap()
        });
        assert_eq!(scores["global_step"], if max_steps.is_some() { 20.0 } else { 8.0 });
        assert_eq!(scores, regressor().evaluate(&eval()).unwrap());
    }
}

#[test]
fn an_evaluator_that_starts_after_the_end_evaluates_the_last_checkpoint_once() {
    let labels = Column::from(prices());
    let input = || EvalSpec::new(once(&labels));
    // Two minutes and ten, and no time that ends.
    for eval in [input(), input().start_delay(Duration::MAX).throttle(Duration::MAX)] {
        let folder = tempfile::tempdir().unwrap();
        let regressor = || {
            let config = RunConfig::new(folder.path()).save_checkpoints_steps(4);
            LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap()
        };
        let train = TrainSpec::new(forever(&labels)).max_steps(10);
        let run = |task: &str| train_and_evaluate_as(&resolver(task), &regressor(), &train, &eval).unwrap();
        assert!(run(CHIEF).is_none());
        let began = std::time::Instant::now();
        assert_eq!(run(EVALUATOR).unwrap()["global_step"], 10.0);
        // Neither the delay before evaluations, nor the hour for a further checkpoint, is waited for.
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
        assert_eq!(std::fs::read_dir(folder.path().join("eval")).unwrap().count(), 1);
    }
}

#[test]
fn an_evaluator_does_not_take_the_end_of_an_earlier_job_as_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    // Both the data's end before max_steps, and the data's end alone.
    for (name, max_steps) in [("limited", Some(100)), ("unlimited", None)] {
        let folder = folder.path().join(name);
        let regressor = |next: Duration| {
            let config = RunConfig::new(&folder).wait_for_checkpoints(Duration::from_secs(60), next);
            LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap()
        };
        let run = |task: &str, next: Duration| {
            let train = TrainSpec::new(once(&labels));
            let train = if let Some(steps) = max_steps { train.max_steps(steps) } else { train };
            let eval = EvalSpec::new(once(&labels)).start_delay(Duration::ZERO).throttle(Duration::ZERO);
            train_and_evaluate_as(&resolver(task), &regressor(next), &train, &eval).unwrap()
        };
        let (long, short) = (Duration::from_secs(60), Duration::from_millis(300));
        assert!(run(CHIEF, long).is_none());
        let scores = std::thread::scope(|threads| {
            let evaluator = threads.spawn(|| run(EVALUATOR, long));
            // The chief starts when the evaluator has evaluated the earlier job's checkpoint.
            while !folder.join("eval").exists() && !evaluator.is_finished() {
                std::thread::sleep(Duration::from_millis(10));
            }
            run(CHIEF, long);
            evaluator.join().unwrap().unwrap()
        });
        assert_eq!(scores["global_step"], 8.0);
        // If the chief has ended before, nothing follows, and the evaluator does not fail.
        assert_eq!(run(EVALUATOR, short).unwrap(), scores);
    }
}

#[test]
fn a_step_that_is_trained_anew_is_evaluated_again() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let regressor = |folder: &Path| {
        let config = RunConfig::new(folder).wait_for_checkpoints(Duration::from_secs(60), Duration::from_secs(60));
        LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap()
    };
    let train = |folder: &Path, labels: &Column| {
        let (train, eval) = (TrainSpec::new(once(labels)), EvalSpec::new(once(labels)));
        train_and_evaluate_as(&resolver(CHIEF), &regressor(folder), &train, &eval).unwrap();
    };
    let (here, beside) = (folder.path().join("here"), folder.path().join("beside"));
    train(&here, &labels);
    train(&here, &labels);
    // The same run, which returns to step 4 and trains on with other data.
    std::fs::create_dir(&beside).unwrap();
    copy(&here.join("step-00000004"), &beside.join("step-00000004"));
    train(&beside, &Column::from(prices().iter().map(|price| 5.0 - price).collect::<Vec<f32>>()));
    let scores = std::thread::scope(|threads| {
        let evaluator = threads.spawn(|| {
            let eval = EvalSpec::new(once(&labels)).start_delay(Duration::ZERO).throttle(Duration::ZERO);
            let train = TrainSpec::new(once(&labels));
            train_and_evaluate_as(&resolver(EVALUATOR), &regressor(&here), &train, &eval)
        });
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !here.join("eval").exists() && !evaluator.is_finished() && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::fs::rename(here.join("step-00000008"), folder.path().join("before")).unwrap();
        std::fs::rename(beside.join("step-00000008"), here.join("step-00000008")).unwrap();
        evaluator.join().unwrap().unwrap().unwrap()
    });
    let of =
        |checkpoint: &Path| regressor(&here).evaluate_checkpoint(&EvalSpec::new(once(&labels)), checkpoint).unwrap();
    assert_eq!(scores, of(&here.join("step-00000008")));
    assert_ne!(scores, of(&folder.path().join("before")));
}

/// Copies the files of a folder.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for file in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

#[test]
fn wrong_clusters_and_endless_waits_are_sentences() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let regressor = |config: RunConfig| LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
    let said = |json: &str, config: RunConfig| {
        let train = TrainSpec::new(forever(&labels)).max_steps(20);
        let eval = EvalSpec::new(once(&labels)).start_delay(Duration::ZERO);
        train_and_evaluate_as(&resolver(json), &regressor(config), &train, &eval).unwrap_err().to_string()
    };
    let config =
        || RunConfig::new(folder.path()).wait_for_checkpoints(Duration::from_millis(1), Duration::from_millis(300));
    let text = said(EVALUATOR, config());
    assert!(
        text.contains("has waited 0 s for a first checkpoint in") && text.contains("wait_for_checkpoints"),
        "{text}"
    );
    regressor(config()).train(forever(&labels), Until::Steps(3)).unwrap();
    let text = said(EVALUATOR, config());
    assert!(text.contains("a checkpoint after step 3"), "{text}");
    let ps = r#"{"cluster": {"chief": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}"#;
    let text = said(ps, config());
    assert!(text.contains("parameter servers") && text.contains("MultiWorkerMirroredStrategy"), "{text}");
    let two = r#"{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}}"#;
    let text = said(two, config());
    assert!(text.contains("2 tasks of the cluster train, but the strategy") && text.contains("has 1"), "{text}");
    let second = r#"{"cluster": {"chief": ["a:1"]}, "task": {"type": "evaluator", "index": 1}}"#;
    let text = TfConfigResolver::from_json(second).unwrap_err().to_string();
    assert!(text.contains("at most one evaluator"), "{text}");
}

#[test]
fn a_run_that_is_told_to_stop_saves_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let (calm, told) = (folder.path().join("calm"), folder.path().join("told"));
    Own::estimator(&calm, "").train(forever(&labels), Until::MaxSteps(9)).unwrap();
    let strategy = mirrored(2);
    let own = Own::estimator(&told, "");
    own.train(forever(&labels), Until::Steps(4)).unwrap();
    drop(own);
    let config = RunConfig::new(&told).train_distribute(&strategy).stop_on(TerminationConfig::default());
    let columns = FeatureColumns::new().with(Numeric::new("rooms"));
    let model_fn = move |_, vb: VarBuilder<'static>| {
        let line = linear(1, 1, vb.pp("line"))?;
        Ok(Own { input: InputLayer::new(&columns, vb)?, line, what: "" })
    };
    let own = Estimator::new(model_fn, |model| Sgd::new(0.1).build(model), config).unwrap();
    strategy.request(Request::Leave);
    let error = own.train(forever(&labels), Until::MaxSteps(9)).unwrap_err();
    let stopped =
        |error: &Error| matches!(error, Error::Train(distribute_train::Error::Preempted { exit_code: 143, .. }));
    assert!(stopped(&error), "{error}");
    assert_eq!(Own::estimator(&told, "").train(forever(&labels), Until::MaxSteps(9)).unwrap(), 9);
    let weight = |folder: &Path| {
        let value = Own::estimator(folder, "").variable_value("line.weight").unwrap();
        value.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0]
    };
    assert!((weight(&calm) - weight(&told)).abs() < 1e-5);
}

#[test]
fn several_workers_agree_on_when_to_save_and_only_the_chief_needs_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let address = distribute_testkit::Ports::reserve(1).unwrap().addresses().remove(0);
    let worker = |rank: u32| {
        let membership = distribute_cluster::Membership::new(rank, 2, address.clone()).unwrap();
        let strategy = MultiWorkerMirroredStrategy::builder().membership(membership).build().unwrap();
        // Each worker has its own folder, and only the chief's is used.
        let config = RunConfig::new(folder.path().join(rank.to_string())).train_distribute(&strategy);
        let config = config.save_checkpoints_every(Duration::ZERO).log_step_count_steps(3);
        let regressor = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
        let train = TrainSpec::new(forever(&labels)).max_steps(10);
        let eval = EvalSpec::new(once(&labels)).throttle(Duration::ZERO);
        // Without tasks in TF_CONFIG both evaluate together.
        let scores = train_and_evaluate_as(&resolver(""), &regressor, &train, &eval).unwrap().unwrap();
        let predictions = regressor.predict(|| Ok(Dataset::from_tensor_slices(houses()).batch(7))).unwrap();
        (scores, predictions["predictions"].flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    let (one, two) = std::thread::scope(|threads| {
        let chief = threads.spawn(|| worker(0));
        let other = threads.spawn(|| worker(1));
        (chief.join().unwrap(), other.join().unwrap())
    });
    assert_eq!(one, two);
    assert_eq!((one.0["global_step"], one.1.len()), (10.0, COUNT));
    let steps = |rank: &str| {
        let entries = std::fs::read_dir(folder.path().join(rank)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.retain(|name| name.starts_with("step-"));
        names.sort();
        names
    };
    assert_eq!(steps("0"), ["step-00000003", "step-00000006", "step-00000009", "step-00000010"]);
    assert!(!folder.path().join("1").exists());
    let alone = RunConfig::new(folder.path().join("0")).eval_distribute(&mirrored(2));
    let alone = LinearRegressor::new(&columns()).build(adam(0.05), alone).unwrap();
    let scores = alone.evaluate(&EvalSpec::new(once(&labels))).unwrap();
    assert!((scores["loss"] - one.0["loss"]).abs() < 1e-5, "{scores:?}");
}

#[test]
fn a_worker_that_has_no_step_left_does_not_leave_the_others_alone() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let config = RunConfig::new(folder.path());
    let alone = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
    alone.train(forever(&labels), Until::MaxSteps(5)).unwrap();
    let address = distribute_testkit::Ports::reserve(1).unwrap().addresses().remove(0);
    let train = &|rank: u32| {
        let membership = distribute_cluster::Membership::new(rank, 2, address.clone()).unwrap();
        let strategy = MultiWorkerMirroredStrategy::builder().membership(membership).build().unwrap();
        let config = RunConfig::new(folder.path()).train_distribute(&strategy);
        let regressor = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
        regressor.train(forever(&labels), Until::MaxSteps([5, 9][rank as usize])).unwrap_err().to_string()
    };
    let told = std::thread::scope(|scope| [0, 1].map(|rank| scope.spawn(move || train(rank))).map(|t| t.join()));
    for told in told {
        let told = told.unwrap();
        assert!(told.contains("train, until: MaxSteps(9)") && told.contains("MaxSteps(5)"), "{told}");
    }
}

#[test]
fn processes_of_an_elastic_job_do_not_train_alone() {
    let folder = tempfile::tempdir().unwrap();
    let membership = distribute_cluster::Membership::new(0, 2, "127.0.0.1:1").unwrap();
    let known = (1..=2).map(|port| Some(format!("127.0.0.1:{port}"))).collect();
    let membership = distribute_cluster::Membership { addresses: known, ..membership };
    let builder = MultiWorkerMirroredStrategy::builder().membership(membership).devices(["CPU:0"]);
    let strategy = builder.elastic(1..=2).build().unwrap();
    let config = RunConfig::new(folder.path()).train_distribute(&strategy);
    let regressor = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
    let error = regressor.train(forever(&Column::from(prices())), Until::Steps(2)).unwrap_err();
    let is_told = matches!(error, Error::Strategy(distribute_strategy::Error::NotJoined { processes: 2, .. }));
    assert!(is_told, "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn settings_that_differ_between_workers_are_named_in_the_first_step() {
    type Change = fn(RunConfig) -> RunConfig;
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let others: [(&str, u64, Change); 5] = [
        ("train, until: MaxSteps(9)", 9, |config| config),
        ("save_checkpoints_steps: 3", 5, |config| config.save_checkpoints_steps(3)),
        ("save_summary_steps: 2", 5, |config| config.save_summary_steps(2)),
        ("log_step_count_steps: 4", 5, |config| config.log_step_count_steps(4)),
        ("stop_on: yes", 5, |config| config.stop_on(TerminationConfig::default().signals(Vec::new()))),
    ];
    for (line, steps, other) in others {
        let address = distribute_testkit::Ports::reserve(1).unwrap().addresses().remove(0);
        let train = &|rank: u32| {
            let membership = distribute_cluster::Membership::new(rank, 2, address.clone()).unwrap();
            let strategy = MultiWorkerMirroredStrategy::builder().membership(membership).build().unwrap();
            let config = RunConfig::new(folder.path()).train_distribute(&strategy);
            let (config, steps) = if rank == 0 { (config, 5) } else { (other(config), steps) };
            let regressor = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
            regressor.train(forever(&labels), Until::MaxSteps(steps)).unwrap_err().to_string()
        };
        let told = std::thread::scope(|scope| [0, 1].map(|rank| scope.spawn(move || train(rank))).map(|t| t.join()));
        for told in told {
            let told = told.unwrap();
            assert!(told.contains(line), "{line}: {told}");
        }
    }
}

#[test]
fn a_worker_that_cannot_evaluate_or_predict_tells_the_others() {
    type Call = fn(&Estimator<CannedModel>, bool) -> Result<()>;
    let folder = tempfile::tempdir().unwrap();
    let alone = LinearRegressor::new(&columns()).build(adam(0.05), RunConfig::new(folder.path())).unwrap();
    alone.train(forever(&Column::from(prices())), Until::MaxSteps(2)).unwrap();
    // The events of this evaluation cannot be written.
    std::fs::write(folder.path().join("eval_full"), []).unwrap();
    let calls: [(&str, u32, Call); 4] = [
        ("the disk is gone", 1, |regressor, fails| regressor.evaluate(&EvalSpec::new(|| given(fails))).map(drop)),
        ("the disk is gone", 0, |regressor, fails| {
            let newest = regressor.latest_checkpoint()?.unwrap();
            regressor.evaluate_checkpoint(&EvalSpec::new(|| given(fails)), newest).map(drop)
        }),
        ("the disk is gone", 1, |regressor, fails| {
            regressor.predict(|| Ok(given(fails)?.map(|(features, _)| Ok(features)))).map(drop)
        }),
        ("eval_full", 0, |regressor, _| regressor.evaluate(&EvalSpec::new(|| given(false)).name("full")).map(drop)),
    ];
    for (words, failing, call) in calls {
        let address = distribute_testkit::Ports::reserve(1).unwrap().addresses().remove(0);
        let built = std::sync::Barrier::new(2);
        let work = &|rank: u32| {
            let membership = distribute_cluster::Membership::new(rank, 2, address.clone()).unwrap();
            let strategy = MultiWorkerMirroredStrategy::builder().membership(membership).build().unwrap();
            // One that fails sooner would end the building of the other strategy.
            built.wait();
            let config = RunConfig::new(folder.path()).train_distribute(&strategy);
            let regressor = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
            let outcome = call(&regressor, rank == failing).map_err(|error| error.to_string());
            // The strategy lives until all have their result, so that nothing but a report can end the others' wait.
            (outcome, regressor, strategy)
        };
        let began = std::time::Instant::now();
        let all = std::thread::scope(|scope| {
            [0, 1].map(|rank| scope.spawn(move || work(rank))).map(|worker| worker.join().unwrap())
        });
        for (outcome, ..) in &all {
            assert!(outcome.as_ref().is_err_and(|error| error.contains(words)), "{words}: {outcome:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{words}: {:?}", began.elapsed());
    }
}

/// A model whose only metric and prediction have names that differ between workers.
struct Called(&'static str, Tensor);

impl EstimatorModel for Called {
    fn spec(&self, features: &Features, labels: Option<&Labels>, _: Mode) -> Result<EstimatorSpec> {
        let values = self.1.broadcast_as(features.examples())?;
        let spec = EstimatorSpec::new().prediction(self.0, &values);
        Ok(match labels {
            Some(_) => spec.loss(&values).metric(self.0, Mean, &values, &values),
            None => spec,
        })
    }
}

#[test]
fn names_and_steps_that_differ_between_workers_are_refused_in_evaluations_and_predictions() {
    type Call = fn(&Estimator<Called>, u32) -> Result<()>;
    let folder = tempfile::tempdir().unwrap();
    let build = |name: &'static str, config: RunConfig| {
        let model_fn = move |_: Mode, vb: VarBuilder<'static>| Ok(Called(name, vb.get(1, "weight")?));
        Estimator::new(model_fn, |model| Sgd::new(0.1).build(model), config).unwrap()
    };
    build("mean", RunConfig::new(folder.path())).train(|| given(false), Until::Steps(1)).unwrap();
    let calls: [(&str, &str, Call); 3] = [
        ("median", "evaluate, metrics: [median] on", |estimator, _| {
            estimator.evaluate(&EvalSpec::new(|| given(false))).map(drop)
        }),
        ("median", "predict, names: [median] on", |estimator, _| {
            estimator.predict(|| Ok(given(false)?.map(|(features, _)| Ok(features)))).map(drop)
        }),
        ("mean", "evaluate, steps: 2 on", |estimator, rank| {
            estimator.evaluate(&EvalSpec::new(|| given(false)).steps(rank as usize + 1)).map(drop)
        }),
    ];
    for (of_second, words, call) in calls {
        let address = distribute_testkit::Ports::reserve(1).unwrap().addresses().remove(0);
        let work = &|rank: u32| {
            let membership = distribute_cluster::Membership::new(rank, 2, address.clone()).unwrap();
            let strategy = MultiWorkerMirroredStrategy::builder().membership(membership).build().unwrap();
            let name = if rank == 0 { "mean" } else { of_second };
            let estimator = build(name, RunConfig::new(folder.path()).train_distribute(&strategy));
            call(&estimator, rank).map_err(|error| error.to_string())
        };
        let all = std::thread::scope(|scope| {
            [0, 1].map(|rank| scope.spawn(move || work(rank))).map(|worker| worker.join().unwrap())
        });
        for outcome in all {
            assert!(outcome.as_ref().is_err_and(|error| error.contains(words)), "{words}: {outcome:?}");
        }
    }
}

/// Returns the data, or an error.
fn given(fails: bool) -> std::result::Result<Examples, BoxError> {
    if fails { Err("the disk is gone".into()) } else { Ok(batches(Column::from(prices()))) }
}
